const char *greet(void);
const char *greet_file(void);
